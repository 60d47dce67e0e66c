"""Compare a model with the best baseline."""

from typing import Any

import numpy as np

from models.tasks.contract import Task
from training.statistics import compare


def against_baselines(task: Task, judged: dict[str, np.ndarray]) -> dict[str, Any]:
    """Compare the model with the best baseline on the same users; judged: arrays of `Task.judge`.

    Return the entry `against_baseline` of result.json: the ratio of the means of the main metric, with its 95% interval
    over users, whether the model's mean is worse (`behind`), and a sentence. The result is empty if the task has no
    baselines.
    """
    baselines, metric = task.baseline_values(judged), task.config.best_metric
    if not baselines:
        return {}
    ours = task.user_values(judged)[1][metric]
    means = {name: float(values.mean()) for name, values in baselines.items()}
    less = task.config.task.less_is_better(metric)
    name = (min if less else max)(means, key=lambda name: means[name])
    result = compare(ours[None], baselines[name][None])
    numbers = {key: value if np.isfinite(value) else None for key, value in result._asdict().items() if key != "seeds"}
    mean, best = float(ours.mean()), means[name]
    facts = {"baseline": name, "metric": metric, "model": mean, "of_baseline": best, **numbers}
    facts |= {"less_is_better": less, "behind": mean > best if less else mean < best}
    return {"against_baseline": facts | {"sentence": sentence(facts)}}


def sentence(facts: dict[str, Any]) -> str:
    """Format the result of `against_baselines` as a sentence."""
    figures = f"{facts['baseline']}: {facts['metric']} {facts['model']:.4f} against {facts['of_baseline']:.4f}"
    if facts["low"] is None:
        return f"Too few users have a value to compare the model with the best baseline, {figures}."
    interval = f"ratio {facts['ratio']:.3f}, 95% interval over users {facts['low']:.3f} to {facts['high']:.3f}"
    words = {"better": "better than", "worse": "worse than", "unclear": "not distinguishable from"}[kind(facts)]
    return f"The model is {words} the best baseline, {figures} ({interval})."


def kind(facts: dict[str, Any]) -> str:
    """Return `better` or `worse` than the baseline, or `unclear` if the interval is missing or contains 1."""
    if facts["low"] is None or facts["low"] <= 1 <= facts["high"]:
        return "unclear"
    return "better" if (facts["low"] > 1) != facts["less_is_better"] else "worse"
