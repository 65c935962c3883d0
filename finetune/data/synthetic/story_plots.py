"""The plots of the built-in stories: slots in order, each with several ways to say the same thing.

`h` is the hero, `f` a friend, `g` a helper; `They`, `them`, `their` follow the person. A slot that begins
with an empty text may be left out. Changing anything changes the stories: raise `GENERATOR_VERSION`.
"""

Slot = tuple[str, ...]

OPENINGS: Slot = (
    "Once upon a time there was {h.a} named {h.name}. {h.They} lived {place}.",
    "There once was {h.a} called {h.name}, who lived {place}.",
    "{h.name} was {h.a}. {h.Their} home was {place}.",
    "Once there lived {h.a} {place}. {h.Their} name was {h.name}.",
    "A long time ago, {h.a} named {h.name} lived {place} with {h.their} family.",
)
CHARACTER: Slot = (
    "",
    "{h.name} was very {nature} and liked to laugh.",
    "Everybody said that {h.name} was {nature}.",
    "{h.They} was {nature}, and {h.they} loved to play outside.",
    "{h.Their} best friend was {f.a} named {f.name}.",
)
ENDINGS: Slot = (
    "That night {h.name} slept well and dreamed of the next day.",
    "{h.name} went home with a big smile.",
    "From that day on, {h.name} and {f.name} were the best of friends.",
    "And they all lived happily {place}.",
    "{h.name} never forgot that day.",
    "When the sun went down, {h.they} told {h.their} mother all about it.",
)

PLOTS: dict[str, tuple[Slot, ...]] = {
    "lost": (
        (
            "{h.They} had {t.a} and took it everywhere.",
            "{h.Their} favorite thing was {t.a}.",
            "{h.Their} grandmother had given {h.them} {t.a}, and {h.they} loved it very much.",
        ),
        (
            "{day}, {h.name} wanted to play, but {t.the} was gone.",
            "{day}, {h.name} woke up and could not find {t.the}.",
            "{day}, {h.they} came home and saw that {t.the} was not there.",
        ),
        (
            "{h.They} looked under the bed and behind the door, but {h.they} did not find it.",
            "{h.They} looked everywhere, in the house and outside, but found nothing.",
            "{h.They} searched and searched until {h.their} feet were tired.",
        ),
        (
            "",
            "{h.name} sat down and began to cry.",
            "{h.They} felt very sad.",
            "A tear ran down {h.their} face.",
        ),
        (
            '"What is wrong?" asked {f.name}. "I lost my {t.noun}," said {h.name}. "I will help you," said {f.name}.',
            'Then {f.name} came by. "Why are you so sad?" {f.they} asked. "My {t.noun} is gone," {h.name} answered.',
            '{h.name} ran to {f.name}. "Have you seen my {t.noun}?" {h.they} asked. "No, but let us look '
            'together," '
            "said {f.name}.",
        ),
        (
            "",
            "They walked a long way and called out, but nobody answered.",
            "First they looked in the kitchen. Then they looked in the yard.",
            "Two pairs of eyes see more than one, so they looked again.",
        ),
        (
            'On the path they met {g.a}. "I saw something {t.colour} {hiding}," said {g.the}.',
            '{g.A} heard them talk. "Go and look {hiding}," {g.they} said.',
            'They asked {g.a} for help. {g.The} thought for a while and said, "Did you look {hiding}?"',
        ),
        (
            "They ran there as fast as they could. {t.The} was {hiding}!",
            "And there it was! {t.The} lay {hiding}, just where {h.name} had played the day before.",
            "{h.name} looked {hiding} and saw something shine. It was {t.the}!",
        ),
        (
            '"Thank you!" said {h.name}, and {h.they} hugged {f.name}.',
            '{h.name} jumped up and down with joy. "You are a true friend," {h.they} told {f.name}.',
            "{h.name} was so happy that {h.they} danced.",
        ),
        (
            "",
            "After that, {h.they} always put {h.their} things back in their place.",
            "Now {h.they} took good care of it.",
        ),
    ),
    "afraid": (
        (
            "But {h.name} was afraid of {fear}.",
            "There was only one thing that {h.they} did not like. {h.They} was afraid of {fear}.",
            "{h.They} was not afraid of much, but {h.they} was very afraid of {fear}.",
        ),
        (
            '{day}, {f.name} said, "Come and play with me!" But when {h.name} thought of {fear}, {h.they} '
            "shook "
            "{h.their} head.",
            "{day}, all the others went out to play. {h.name} stayed behind because of {fear}.",
            "{day}, {h.name} and {f.name} went for a walk. Soon {h.name} stopped, because {h.they} was so scared.",
        ),
        (
            '"I cannot do it," {h.they} said in a small voice.',
            "{h.Their} legs shook and {h.their} heart beat fast.",
            "{h.They} hid {h.their} face and wanted to go home.",
        ),
        (
            "",
            "{f.name} did not laugh at {h.them}.",
            "The others waited for {h.them}.",
            "{h.name} felt small and alone.",
        ),
        (
            '{g.A} came and sat down beside {h.them}. "I was afraid too when I was young," said {g.the}.',
            '"What are you afraid of?" asked {g.a}. "I am afraid of {fear}," whispered {h.name}.',
            '{f.name} went to get {g.a}. "Everybody is afraid sometimes," {g.the} said kindly.',
        ),
        (
            '"Take a deep breath and count to three," {g.they} said. "Then take one small step."',
            '"Hold my hand," said {f.name}. "We will go together."',
            '"You do not have to do it all at once," {g.they} said. "Try a little bit today."',
        ),
        (
            "{h.name} closed {h.their} eyes. One, two, three! Then {h.they} {deed}.",
            "So {h.name} took a deep breath, and very slowly {h.they} {deed}.",
            "At first {h.they} wanted to run away. But {h.they} stayed, and then {h.they} {deed}.",
        ),
        (
            "Nothing bad happened at all.",
            "It was not so bad!",
            "It was even a little bit fun.",
        ),
        (
            '"You did it!" cried {f.name}. "I am so proud of you."',
            '"I did it!" shouted {h.name}. "Did you see me?"',
            "Everybody clapped, and {h.name} felt ten feet tall.",
        ),
        (
            "",
            "{h.name} learned that it is fine to be afraid.",
            "Being brave means to try even when you are scared.",
        ),
    ),
    "quarrel": (
        (
            "{day}, {h.name} and {f.name} found {t.a} {hiding}.",
            "{day}, {h.name} played with {f.name}. They saw {t.a} {hiding}.",
            "{day}, {f.name} came to visit and brought {t.a}.",
        ),
        (
            '"It is mine!" said {h.name}. "No, it is mine!" said {f.name}.',
            '"I want it first," said {f.name}. "No, I want it first!" cried {h.name}.',
            "Both of them wanted to have {t.the}, and nobody wanted to wait.",
        ),
        (
            "{h.name} pulled on one side and {f.name} pulled on the other side.",
            "They shouted at each other until their faces were red.",
            "{h.name} took {t.the} and ran away with it. {f.name} ran after {h.them}.",
        ),
        (
            "Then {t.the} fell into the water with a splash.",
            "Then {t.the} rolled down the hill and was gone.",
            "{f.name} was so angry that {f.they} went home.",
        ),
        ("", "Now nobody could play.", "It became very quiet.", "{h.name} did not feel happy at all."),
        (
            '{g.A} had seen everything. "Why do you fight?" {g.they} asked. "There is enough time for both of you."',
            '{h.name} told {g.a} what had happened. "A friend is worth more than a {t.noun}," {g.the} said.',
            'Then {g.a} came along. "Toys are more fun when you share them," said {g.the}.',
        ),
        (
            "{h.name} thought about it for a long time.",
            "{h.name} looked at the ground. {h.They} knew that {g.the} was right.",
            "{h.They} felt sorry for what {h.they} had said.",
        ),
        (
            '{h.They} went to {f.name} and said, "I am sorry. Let us play together." "I am sorry too," said {f.name}.',
            '"I am sorry that I was mean," {h.name} told {f.name}. {f.name} smiled and gave {h.them} a hug.',
        ),
        (
            "Together they went to get {t.the}, and then they took turns.",
            "First {f.name} played with {t.the}, and then {h.name} did.",
            "They found {t.the} again and made up a game for two.",
        ),
        ("", "It was much more fun than to play alone.", "They laughed and played until it was dark."),
    ),
    "broken": (
        (
            "{f.name} had {t.a} that {f.they} loved very much.",
            "{f.name} once let {h.them} hold {t.a}. It was the finest thing that {f.they} had.",
        ),
        (
            "{day}, {h.name} played with {t.the} in the house. {h.They} ran too fast and fell. Crack! It broke.",
            "{day}, {h.name} wanted to see how {t.the} was made. {h.They} pulled too hard, and it broke in two.",
            "{day}, {t.the} slipped out of {h.their} hands and fell on the floor. It was broken.",
        ),
        (
            "{h.name} was scared. {h.They} hid the pieces {hiding}.",
            "Nobody had seen it. Quickly {h.they} put the pieces {hiding}.",
            '"Oh no," thought {h.name}. {h.They} hid {t.the} {hiding} and said nothing.',
        ),
        (
            'Soon {f.name} came. "Where is my {t.noun}?" {f.they} asked. "I do not know," said {h.name}.',
            '{f.name} looked for {t.the} all day. "Have you seen it?" {f.they} asked. {h.name} only shook '
            "{h.their} head.",
        ),
        (
            "That night {h.name} could not sleep. {h.Their} tummy hurt because {h.they} had told a lie.",
            "{h.name} did not want to eat or play. The lie felt like a stone in {h.their} pocket.",
        ),
        (
            "",
            '{g.A} saw {h.their} sad face. "Tell the truth, and you will feel better," said {g.the}.',
            '"What should I do?" {h.they} asked {g.a}. "You know it already," {g.the} answered.',
        ),
        (
            'In the morning {h.they} went to {f.name}. "I broke your {t.noun}," {h.they} said. "I am very sorry."',
            'At last {h.they} told {f.name} everything. "I was afraid that you would be angry," {h.they} said.',
        ),
        (
            '{f.name} was sad at first. Then {f.they} said, "Thank you for telling me. We can fix it."',
            '"I am a little bit angry," said {f.name}, "but I am glad that you told me the truth."',
        ),
        (
            "They got some glue and some string, and they worked until {t.the} was whole again.",
            "Together they put the pieces back. {t.The} looked almost like new.",
            "{g.A} helped them, and soon {t.the} was as good as before.",
        ),
        ("", "{h.name} felt light and happy again.", "{h.name} learned that it is best to tell the truth."),
    ),
    "rescue": (
        (
            "{day}, {h.name} went for a walk. Suddenly {h.they} heard a small voice.",
            "{day}, {h.name} was on the way to {f.name}. Then {h.they} heard somebody cry.",
            "{day}, {h.they} picked flowers. All at once there was a strange sound.",
        ),
        (
            '"Help! Help!" it called. It was a {stuck.who}, and it was stuck {stuck.where}.',
            "A {stuck.who} was stuck {stuck.where} and could not get out.",
        ),
        (
            '"Do not be afraid," said {h.name}. "I will help you."',
            '"Who are you?" asked {h.name}. "I am only a {stuck.who}," it said. "Please help me!"',
            "{h.name} did not wait. {h.They} ran to the {stuck.who} at once.",
        ),
        (
            "{h.They} tried as hard as {h.they} could. {stuck.why}, and {h.name} was not strong enough.",
            "{h.They} tried once, and {h.they} tried again. But it did not work. {stuck.why}.",
        ),
        (
            "",
            "The sky became dark, and it began to rain.",
            "The {stuck.who} was very tired.",
            "Time went by.",
        ),
        (
            '"I cannot do it alone," thought {h.name}, and {h.they} ran to get {f.name} and {g.a}.',
            "{h.They} called for {f.name}. {f.name} came at once and brought {g.a}.",
            "{h.name} asked {g.a} for help, and {f.name} came too.",
        ),
        (
            '{g.The} had an idea. "We must work together," {g.they} said. "One, two, three, now!"',
            '"I will push and you will pull," said {g.the}. {h.name} pulled with all {h.their} strength.',
            "{f.name} fetched a rope, {g.the} held it, and {h.name} pulled.",
        ),
        (
            "And then the {stuck.who} was free!",
            "With a loud pop the {stuck.who} came out.",
            "Slowly, very slowly, they got the {stuck.who} out.",
        ),
        (
            '"Thank you, {h.name}," said the {stuck.who}. "You saved me."',
            "The {stuck.who} was so happy that it danced around them.",
            'The {stuck.who} said, "I will never forget what you did for me."',
        ),
        ("", "Together they were stronger than alone.", "It is good to have friends who help."),
    ),
    "share": (
        (
            "{day}, {h.name} got {food.a} from {h.their} aunt.",
            "{day}, {h.name} made {food.a} all by {h.self}.",
            "{day}, {h.name} found {food.a} on the table, and it was for {h.them}.",
        ),
        (
            "It smelled so good that {h.they} wanted to eat it all.",
            '"This is all mine," {h.they} thought, and {h.they} was very pleased.',
            "{h.They} sat down in the sun and began to eat.",
        ),
        (
            'Then {f.name} came by. "May I have a little bit?" {f.they} asked. "No," said {h.name}, "it is mine."',
            '"I am so hungry," said {f.name}. But {h.name} turned {h.their} back and went on eating.',
        ),
        (
            "{f.name} went away with a sad face.",
            "{f.name} said nothing and walked home.",
        ),
        (
            "{h.name} ate and ate until {h.their} tummy hurt.",
            "But alone it did not taste as good as {h.name} had thought.",
            "{h.name} looked at the empty place next to {h.them}. Suddenly {h.they} was not hungry any more.",
        ),
        (
            '{g.A} walked past. "Food tastes better with friends," said {g.the}.',
            '"Why are you all alone?" asked {g.a}. {h.name} did not know what to say.',
            "Then {h.they} saw how {g.a} gave half of an apple to a small bird.",
        ),
        (
            "Now {h.name} knew what {h.they} had to do. {h.They} took the rest of the {food.noun} and ran to {f.name}.",
            "{h.name} was ashamed. {h.They} went to {f.name} and brought what was left.",
        ),
        (
            '"I am sorry," {h.they} said. "Please eat with me." {f.name} smiled, and they ate together.',
            '"Here, this half is for you," {h.they} said. "Thank you!" said {f.name} with shining eyes.',
        ),
        (
            "",
            "The next day {f.name} brought some berries and shared them too.",
            "They even gave some to {g.the}.",
            "It was the best meal that they had ever had.",
        ),
        (
            "",
            "{h.name} learned that it is nice to share.",
            "From then on, {h.name} always shared with others.",
        ),
    ),
    "patience": (
        (
            '{day}, {g.a} gave {h.them} a seed. "Put it in the earth and wait," {g.they} said.',
            "{day}, {h.name} found a seed {hiding}.",
            "{day}, {h.name} and {f.name} wanted to have {plant.a}, so they got a seed.",
        ),
        (
            "{h.They} dug a hole, put the seed in it and gave it water.",
            "{h.name} planted it in a sunny place and watered it well.",
        ),
        (
            "The next morning {h.they} ran outside, but there was nothing to see.",
            "{h.They} sat down and waited. One hour went by, and then another, but nothing grew.",
        ),
        (
            '"Grow, seed, grow!" {h.they} shouted. But the seed did not grow.',
            '"It is taking too long," {h.they} said to {f.name}. "I want to see {plant.a} now!"',
            "{h.They} sang to it and danced around it, but nothing happened.",
        ),
        (
            "",
            "{h.name} became angry and kicked a stone.",
            "{h.name} was sad and wanted to dig the seed up again.",
        ),
        (
            '"Good things need time," said {g.the}. "Give it water every day, and do not give up."',
            '"You cannot see it, but it is growing under the ground," {g.the} told {h.them}.',
        ),
        (
            "So {h.name} came every day with water. The sun shone, the rain fell, and the days went by.",
            "So {h.they} waited. {h.They} gave it water each morning, and {f.name} helped {h.them}.",
        ),
        (
            'Then, after many days, a small green leaf came out. "Look!" cried {h.name}.',
            '"Come quickly!" {f.name} called one morning. There was a tiny green leaf.',
        ),
        (
            "It grew and grew, and in the end it was the most beautiful {plant.noun} of all.",
            "Week after week it became taller, until {plant.a} stood there.",
        ),
        (
            "{h.name} was very proud of it.",
            "Everybody came to see it.",
            '"It was worth the wait," said {h.name}.',
        ),
        ("", "Now {h.they} knew that good things take time.", "{h.They} kept one seed for the next year."),
    ),
}
