# SPDX-License-Identifier: Apache-2.0
"""Rounds without an active client: a run with too many of them in a row ends with an error."""

from __future__ import annotations

from collections.abc import Callable

from fastagg.integrations._report import RoundReport


class EmptyRounds(RuntimeError):
    """Raised after too many rounds in a row without an active client.

    Attributes:
        report: of the last of them, which is finished.
    """

    def __init__(self, text: str, report: RoundReport) -> None:
        super().__init__(text)
        self.report = report


class EmptyCount:
    """Counts the rounds without an active client since the last one with one.

    Args:
        most: number of such rounds in a row with which a run ends.

    Attributes:
        in_a_row: their number, in this process.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_a_row = 0

    def add(self, report: RoundReport, asked: int, *, trains: bool) -> EmptyRounds | None:
        """Count a finished round; return the error with which the run ends, None if it goes on.

        Args:
            report: of the round.
            asked: number of clients that were asked.
            trains: whether they were asked to train; a round without training is not empty.
        """
        self.in_a_row = 0 if report.active or not trains else self.in_a_row + 1
        if self.in_a_row < self.most:
            return None
        reasons = list(dict.fromkeys(report.rejected.values()))[:3]
        return EmptyRounds(
            f"max_empty_rounds: {self.in_a_row} rounds in a row had no active client; in the last "
            f"one, round {report.round}, {asked} clients were asked, {len(report.absent)} did not "
            f"answer and {len(report.rejected)} answers were rejected"
            + (f" ({'; '.join(reasons)})" if reasons else ""),
            report,
        )

    def check_run(self, rounds: int) -> None:
        """Check that a run of ``rounds`` rounds had an active client.

        Raises:
            RuntimeError: it has had rounds, and no client was active in any of them.
        """
        if 0 < rounds <= self.in_a_row:
            raise RuntimeError(
                f"no client was active in any of the {rounds} rounds; the log says why"
            )


def close_and_note(
    close: Callable[[], RoundReport], note: Callable[[RoundReport], None]
) -> RoundReport:
    """Close a round, and pass its report to ``note``, also if the run ends with it; return it.

    Raises:
        EmptyRounds: from ``close``.
    """
    try:
        report = close()
    except EmptyRounds as error:
        note(error.report)
        raise
    note(report)
    return report
