"""The transaction: every member at a version, or each at the one it had."""
