"""What the demo embeds: whole sentences of many lengths and topics, among them pairs that mean nearly the same.

Bare interjections are left out, and the demo's requirement does not hold for them: "It works!" or "No." say so little
that quantising moves their embeddings further.
"""

PARAPHRASES = (
    ("The train to the coast was delayed by two hours.", "Our train to the seaside left two hours late."),
    ("How do I reset the password of my account?", "I forgot my password; how can I set a new one?"),
    ("A dog is chasing a ball across the park.", "In the park, a puppy runs after a ball."),
)

SENTENCES = (
    *(sentence for pair in PARAPHRASES for sentence in pair),
    "Our neighbours keep bees.",
    "The kettle is boiling over.",
    "Why is the sky blue?",
    "Please call me back before noon.",
    "Water boils at a lower temperature on a high mountain.",
    "The committee postponed its vote on the new budget until the auditors had finished their report.",
    "She tuned her violin, took a breath, and walked out into the light.",
    "Preheat the oven to 220 degrees, then roast the peppers until their skins blister and turn black.",
    "Our quarterly revenue grew by 14%, while operating costs fell slightly.",
    "The goalkeeper saved two penalties and the visitors went home with a point.",
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar and oxygen.",
    "In 1781 William Herschel saw a faint disc through his telescope and first took it for a comet.",
    "Interest rates, inflation and unemployment rarely move the way the textbooks say they should.",
    "def mean(xs): return sum(xs) / len(xs)  # fails on an empty list",
    "SELECT name, SUM(amount) FROM orders GROUP BY name ORDER BY 2 DESC LIMIT 10;",
    "A binary search halves the interval at every step, so a million entries need about twenty comparisons.",
    "The tenant shall give at least sixty days' written notice before ending the lease.",
    "Take one tablet twice a day with food, and see a doctor if the rash does not fade within a week.",
    "My grandmother kept every letter he wrote her in a tin under the stairs.",
    "Der Zug nach Hamburg fährt heute von Gleis sieben.",
    "¿Dónde está la biblioteca más cercana?",
    "Snow fell all night, and by morning the village had lost its roads, its fences and most of its sounds.",
    "Turn left at the second traffic light, go past the bakery, and park behind the blue gate.",
    "The museum's new wing holds pottery, weapons and jewellery from the late Bronze Age.",
    "Honestly, the first half bored me, but the ending more than made up for it.",
    "Version 2.3.1 fixes a crash when the configuration file is missing.",
    "Bees find their way by the sun, by landmarks, and by the scent that other bees leave behind.",
    "He sold the boat.",
    "The enzyme binds its substrate in a narrow cleft; a single mutation there slows the reaction a thousandfold.",
    "Three hundred volunteers planted eleven thousand saplings along the river in one weekend.",
    "No refunds after 30 days, no exceptions.",
    "Tomorrow: light rain in the north, dry and windy elsewhere, highs of 12 to 15 °C.",
    "If the sum of the digits of a number is divisible by nine, then so is the number itself.",
    "The old lighthouse stands on a rock three miles from the harbour. For a hundred and forty years a keeper climbed "
    "its stairs every evening to light the lamp, until in 1989 the last of them handed his keys to an engineer and "
    "rowed ashore. Since then a small computer has done the work: it measures the daylight, starts the motor, and "
    "sends a short message to the mainland when a bulb fails. Twice a year a boat brings a technician who cleans the "
    "lens, paints what the salt has eaten, and reads the visitors' book that nobody signs any more.",
)
