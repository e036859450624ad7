"""By which of a machine's network interfaces others reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

_GLOO = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux, see netdevice(7)


def let_gloo_use_the_way_to(host: str, port: int) -> None:
    """Let gloo's groups of this process listen on the interface by which `host` is reached, unless somebody has said which.

    Of itself gloo takes the address that the machine's own name leads to, often loopback, which ranks elsewhere cannot reach.
    It reads this from the environment whenever a group is made, and there is no option for it. On loopback nothing is changed,
    nor over IPv6.
    """
    address = _own_address(host, port)
    if _GLOO in os.environ or not address or ipaddress.ip_address(address).is_loopback:  # noqa: TID251 -- see above
        return
    if name := _interface_with(address):
        os.environ[_GLOO] = name  # noqa: TID251 -- as above


def _own_address(host: str, port: int) -> str:
    """Return the IPv4 address of this machine from which `host` is reached, or nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: the kernel only chooses the way
            return str(probe.getsockname()[0])
    except OSError:
        return ""  # meeting there will say what is wrong


def _interface_with(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    return ""
