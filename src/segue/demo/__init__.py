"""The demo: `shop` fetches and cleans a real log, `planted` is its substitute without a network, `tour` runs it."""

from segue.demo.tour import run_demo

__all__ = ["run_demo"]
