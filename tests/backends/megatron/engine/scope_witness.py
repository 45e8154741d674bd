"""An extension with process-global state per micro-batch, and kernels that check whose state they see.

The scope sets the lengths of its micro-batch, as MindSpeed's ``set_actual_seq_len`` does. The attention
kernel, in forward passes and in recomputations, compares them with the lengths that it is called with.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

from anytron import hookimpl
from anytron.sequences import scopes

LENGTHS: list[int] | None = None


class ScopeWitness:
    name = "scope-witness"

    def __init__(self) -> None:
        self.log = Path(os.environ["SCOPE_WITNESS_LOG"])

    def note(self, **entry) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"rank": int(os.environ.get("RANK", "-1")), **entry}) + "\n")

    @hookimpl
    def preprocess_sequences(self, inputs):
        lengths = inputs.layout.lengths.tolist()
        self.note(event="preprocess", lengths=lengths)

        @contextlib.contextmanager
        def scope():
            global LENGTHS  # noqa: PLW0603 - the state whose leaks this test looks for
            before, LENGTHS = LENGTHS, lengths
            self.note(event="enter", lengths=lengths)
            try:
                yield
            finally:
                LENGTHS = before
                self.note(event="leave", lengths=lengths)

        return replace(inputs, scope=scopes.combine(inputs.scope, scope))

    @hookimpl
    def attention_kernel(self, spec):
        from anytron.kernels.attention import make_attention

        kernel = make_attention(spec)

        def witness(query, key, value, call):
            called = call.cu_seqlens_q.diff().tolist()
            self.note(event="attend", sees=LENGTHS, lengths=called)
            return kernel(query, key, value, call)

        return witness
