"""Choose the options that are `auto` from the data: the term of repeats and what competes in the loss."""

from training.config import RunConfig

PATTERNS = 8  # of the term of repeats


def with_repeats(config: RunConfig) -> RunConfig:
    """Return the configuration with `model.head.repeats` and `loss.exclude` for its `eval.filter_seen`, if `auto`."""
    model, loss, allowed = config.model, config.loss, config.eval.filter_seen == "none"
    if model.head.repeats == "auto":
        head = model.head.model_copy(update={"repeats": PATTERNS if allowed else 0})
        model = model.model_copy(update={"head": head})
    if loss.exclude == "auto":
        loss = loss.model_copy(update={"exclude": "none" if allowed else "history"})
    return config.model_copy(update={"model": model, "loss": loss})
