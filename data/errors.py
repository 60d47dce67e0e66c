"""Define the errors that programs print without a traceback."""


class UserError(ValueError):
    """Base of the errors that a user can fix. `str(error)` has the fault and its place, in one line for each fault."""


class ConfigError(UserError):
    """A configuration is wrong; the message has a line for each error."""
