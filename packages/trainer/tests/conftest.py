from hypothesis import HealthCheck, settings

# No test here is timed: on a busy machine drawing an example may take seconds, and that is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
