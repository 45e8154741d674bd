"""A process that says where it stands in a call, letter by letter, before it answers."""

from __future__ import annotations

from anytron.task.isolation.worker import calls, enter


def main(channel, lifeline):
    connection, start = enter(channel, lifeline)
    for word, give in calls(connection, start):
        for letter in word:
            give({"at": letter})
        give({"said": word})
