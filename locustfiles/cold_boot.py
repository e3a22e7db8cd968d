"""Cold boot: all users ask at once while every cache is empty.

    locust -f locustfiles/cold_boot.py --host http://127.0.0.1:8000 --headless -u 1000 -r 1000 -t 12

Start the service afresh (and with an empty Redis) just before.
"""

from load import MenuUser


class ColdBoot(MenuUser):
    """Asks for menus that are in no cache yet."""
