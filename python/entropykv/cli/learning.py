"""Declare --learn, and print what was learnt."""

from __future__ import annotations

import argparse

from entropykv.cli.notes import say
from entropykv.session.learning import LEAST_TOKENS, Learner
from entropykv.session.session import Session


def add_learn_option(group: argparse._ActionsContainer, when: str) -> None:
    """Add --learn; `when` says from when on the profile is used."""
    group.add_argument(
        "--learn",
        action="store_const",
        const=True,
        help="where the model has no entropy profile, leave one beside it, from what texts that "
        "are read twice (--policy auto, longer than the budget) show of its heads: "
        f"{LEAST_TOKENS} tokens of them; it has nothing of what they say, and {when}",
    )


def say_obstacle(learner: Learner | None) -> None:
    """Print why nothing can be learnt, if so, before anything is read."""
    if learner is not None and learner.obstacle is not None:
        say(f"--learn: {learner.obstacle}")


def say_learnt(session: Session) -> None:
    """Print what was learnt at the end, but not an obstacle, which say_obstacle() has printed."""
    learner, fit = session.learner, session.predictor_fit
    if learner is not None and learner.obstacle is None:
        report = learner.report()
    else:
        report = fit.report() if fit is not None else None
    if report:
        say(report)
