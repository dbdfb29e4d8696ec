"""How the cost of public calls grows with the size of what they are given; see ``growth.run``."""
