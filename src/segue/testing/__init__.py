"""The laws that every encoder obeys, as plain functions for your own tests. A broken law raises an AssertionError.

    def test_my_model() -> None:
        segue.testing.check_encoder(build)

or one test a law:

    @pytest.mark.parametrize("law", segue.testing.laws_of(segue.testing.Case(build)))
    def test_my_model(law) -> None:
        law(segue.testing.Case(build))

The laws are the functions of `segue.testing.laws`, which segue's own encoders pass too. They need neither data nor a
test framework, and take seconds.
"""

from segue.testing.cases import Case
from segue.testing.check import check_encoder, laws_of

__all__ = ["Case", "check_encoder", "laws_of"]
