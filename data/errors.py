"""Define the errors whose message a program prints to the user, without a traceback."""


class UserError(ValueError):
    """Base of the errors that a user can mend. `str(error)` is one line that says what is wrong and where."""


class ConfigError(UserError):
    """A configuration has errors, one line each."""
