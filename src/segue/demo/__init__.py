"""The whole path on a real shop's log: `shop` fetches and cleans it, `planted` stands in, `tour` walks and shows."""

from segue.demo.tour import run_demo

__all__ = ["run_demo"]
