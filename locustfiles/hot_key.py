"""Hot key: a few restaurants get most requests, by Zipf's law.

    locust -f locustfiles/hot_key.py --host http://127.0.0.1:8000 --headless --restaurants 500 -u 500 -r 500 -t 30

Coalescing saves most where most requests ask for the same key.
"""

from collections.abc import Sequence

from load import MenuUser
from locust import events
from locust.argument_parser import LocustArgumentParser
from options import options_of


@events.init_command_line_parser.add_listener
def add_exponent(parser: LocustArgumentParser) -> None:
    """Add the option that says how uneven the popularity is."""
    parser.add_argument(
        "--exponent", type=float, default=1.1, help="Zipf's exponent: 0 makes all restaurants alike. [1.1]"
    )


class HotKey(MenuUser):
    """Asks for popular menus more often."""

    def weights(self) -> Sequence[float]:
        """Return the popularity of the restaurant of each rank: 1, 1/2^s, 1/3^s, …."""
        options = options_of(self.environment)
        return [rank**-options.exponent for rank in range(1, options.restaurants + 1)]
