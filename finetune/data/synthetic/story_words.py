"""The words of the built-in stories. Changing any of them changes the stories: raise `GENERATOR_VERSION`."""

GIRLS = (
    *("Anna", "Bella", "Clara", "Dora", "Ella", "Flora", "Greta", "Hanna", "Ida", "June", "Kitty", "Lena"),
    *("Maya", "Nora", "Olive", "Pia", "Rosa", "Sara", "Tilda", "Vera", "Wanda", "Zoe"),
)
BOYS = (
    *("Adam", "Bruno", "Carl", "Dan", "Emil", "Finn", "Gus", "Hugo", "Ivan", "Jonas", "Kurt", "Leo"),
    *("Max", "Nils", "Oscar", "Paul", "Robin", "Sam", "Toby", "Ulf", "Victor", "Will"),
)
ANIMALS = (
    *("fox", "rabbit", "bear", "mouse", "duck", "hedgehog", "squirrel", "frog", "goat", "kitten", "puppy"),
    *("lamb", "otter", "pony"),
)
SMALL = ("little", "small", "young", "tiny")
NATURES = ("kind", "brave", "curious", "cheerful", "quiet", "clever", "gentle", "funny", "shy", "busy")
HELPERS = (
    *(("old", "owl"), ("wise", "turtle"), ("friendly", "farmer"), ("tall", "heron"), ("slow", "snail")),
    *(("kind", "baker"), ("old", "donkey"), ("big", "horse"), ("gray", "goose"), ("clever", "crow")),
    *(("old", "fisherman"), ("gentle", "cow"), ("wise", "badger"), ("busy", "gardener")),
)
PLACES = (
    *("in the forest", "by the river", "on the hill", "in the garden", "near the lake", "in the meadow"),
    *("behind the mill", "by the sea", "at the edge of the village", "in the park", "under the big oak tree"),
    *("near the old bridge", "on the farm", "in the orchard"),
)
DAYS = (
    *("One sunny morning", "One day", "One warm afternoon", "One cold morning", "One windy day"),
    *("On a bright spring day", "One quiet evening", "Early one morning", "On the first day of summer"),
    *("One autumn day", "One rainy afternoon", "After breakfast one day"),
)
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "white", "golden", "silver", "brown")
TOYS = (
    "ball",
    "kite",
    "drum",
    "boat",
    "hat",
    "scarf",
    "whistle",
    "lantern",
    "bell",
    "basket",
    "ribbon",
    "cup",
)
FOODS = (
    "cake",
    "pie",
    "loaf of bread",
    "bowl of soup",
    "basket of plums",
    "jar of honey",
    "bag of nuts",
    "big cookie",
)
PLANTS = ("apple tree", "sunflower", "pumpkin", "rose", "bean plant", "cherry tree", "tulip", "melon")
HIDING = (
    *("under a bush", "behind a log", "inside a hollow tree", "under the bench", "between two stones"),
    *(
        "in the tall grass",
        "on top of the fence",
        "behind the shed",
        "under a pile of leaves",
        "beside the well",
    ),
)
FEARS = (
    ("the dark", "walked into the dark barn"),
    ("deep water", "swam across the pond"),
    ("thunder", "sat by the window in the storm"),
    ("high places", "climbed to the top of the tower"),
    ("loud dogs", "walked past the barking dog"),
    ("the long bridge", "crossed the long bridge"),
    ("the cave", "looked into the cave"),
    ("singing alone", "sang a song in front of everybody"),
)
STUCK = (
    ("bird", "in a net", "The net was too tight"),
    ("beetle", "in a puddle of mud", "The mud was too deep"),
    ("piglet", "under the gate", "The gate was too heavy"),
    ("cat", "high up in a tree", "The branch was too high"),
    ("lizard", "under a fallen branch", "The branch was too heavy"),
    ("chick", "in a deep hole", "The hole was too deep"),
    ("calf", "behind a wall", "The wall was too high"),
    ("butterfly", "in a jar", "The lid was too tight"),
)
