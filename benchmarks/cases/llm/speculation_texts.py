"""Fixed texts of `benchmarks llm --workload speculation`: tasks whose answers repeat their prompts, and others."""

_INVENTORY = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise ValueError("not enough items")
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())
"""
_TEMPERATURES = """def read_temperatures(path):
    readings = []
    with open(path) as file:
        for line in file:
            station, value = line.strip().split(",")
            readings.append((station, float(value)))
    return readings


def mean_by_station(readings):
    sums = {}
    for station, value in readings:
        total, count = sums.get(station, (0.0, 0))
        sums[station] = (total + value, count + 1)
    return {station: total / count for station, (total, count) in sums.items()}
"""
_SETTINGS = """{
  "server": {"host": "127.0.0.1", "port": 8000, "workers": 4},
  "database": {"host": "127.0.0.1", "port": 5432, "name": "orders", "pool": 10},
  "cache": {"host": "127.0.0.1", "port": 6379, "seconds": 300},
  "log": {"level": "info", "file": "/var/log/orders.log", "rotate": true}
}
"""
_LIGHTHOUSE = """The lighthouse on the northern cape was built in 1868 by masons from three villages. Its lamp burned \
oil until 1931, when a cable from the mainland brought electricity. The last keeper, Ada Holm, lived in the tower for \
twenty-six years and wrote down every ship that passed. Her notebooks are kept in the town library. In 1994 the lamp \
became automatic, and the tower is open to visitors from May to September."""
_BEES = """A colony of honey bees has one queen, several hundred drones and up to fifty thousand workers. The workers \
clean the cells, feed the larvae, build the comb and guard the entrance before they fly out to collect nectar. A bee \
that has found a good field dances on the comb; its angle shows the direction, and its length the distance. In \
winter the bees form a cluster and keep it warm with their muscles."""
_MEETING = """Monday: the pump in hall two was repaired and runs again. Tuesday: the new filters arrived, but two of \
them were damaged and went back. Wednesday: the filters in hall one were changed. Thursday: the pressure in hall two \
fell again, and the pump was stopped. Friday: a mechanic found a crack in its housing; it will be replaced next week."""

# Edits of code, and summaries of their own prompts: a task, and how its answer begins, as an editor's completions do.
REPEATING = (
    (
        f"Rename the method `total` to `count_items` and return the whole class.\n\n```python\n{_INVENTORY}```",
        "The class:\n\n```python\nclass Inventory:\n    def __init__(self):\n        self.items = {}\n\n    def add(",
    ),
    (
        f"Write `amount` in place of `value` in this code and return all of it.\n\n```python\n{_TEMPERATURES}```",
        "Here is the whole code:\n\n```python\ndef read_temperatures(path):\n    readings = []\n",
    ),
    (
        f"Change the port of the server to 9000 and return the whole file.\n\n```json\n{_SETTINGS}```",
        'Here is the whole file:\n\n```json\n{\n  "server": {"host": "127.0.0.1", "port": 9000,',
    ),
    (
        f"Summarize this text by its most important sentences, word for word.\n\n{_LIGHTHOUSE}",
        "The lighthouse on the northern cape was built in 1868",
    ),
    (
        f"Correct the mistakes of this text, and return the whole text.\n\n{_BEES}",
        "A colony of honey bees has one queen,",
    ),
    (
        f"List what happened on each day, in the words of these notes.\n\n{_MEETING}",
        "- Monday: the pump in hall two was repaired",
    ),
)
# Free answers, drawn with a temperature: a small model repeats itself if it always takes the most probable token.
OTHER = (
    "Tell a story of a fisherman who finds a door at the bottom of the sea.",
    "Explain to a child why the sky is blue, and why it is red in the evening.",
    "Describe a market in a small mountain town in the early morning.",
    "Which animals live in a desert, and how do they find water?",
    "Write a letter to a friend about your first week in a new city.",
    "How is bread made? Describe each step and what happens in it.",
)
