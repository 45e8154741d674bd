"""A taskset of verifiers 0.4: products of two numbers, with a tool server that multiplies."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["ProductsTaskset"]


class ProductData(vf.TaskData):
    answer: str


class ProductConfig(vf.TaskConfig):
    calculator: vf.ToolsetConfig = vf.ToolsetConfig()


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def multiply(self, first: int, second: int) -> int:
        """Multiply two numbers."""
        return first * second


class ProductTask(vf.Task[ProductData, vf.State, ProductConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.calculator)]

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tool_calls(self, trace) -> float:
        return len(trace.tool_messages)


class ProductsConfig(vf.TasksetConfig):
    task: ProductConfig = ProductConfig()


class ProductsTaskset(vf.Taskset[ProductTask, ProductsConfig]):
    def load(self):
        for first in range(4):
            data = ProductData(
                prompt=f"What is {first} times 12?", system_prompt="multiply", answer=str(12 * first), name=f"{first}"
            )
            yield ProductTask(data, self.config.task)


if __name__ == "__main__":
    Calculator.run()
