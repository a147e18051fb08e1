"""Say what came of --learn."""

from __future__ import annotations

from entropykv.cli.notes import say
from entropykv.session.learning import Learner
from entropykv.session.session import Session


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
