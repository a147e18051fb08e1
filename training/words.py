"""List the words of the facts model; every word is one token."""

from __future__ import annotations

NAMES = """
Ada Adam Agnes Alan Albert Alice Amy Andrew Anna Arthur Astrid August Barbara Basil Beatrice Ben
Bertha Boris Brian Bruno Calvin Camille Carl Carmen Cecil Celia Chloe Clara Claude Conrad Cora
Cyril Daisy Daniel Daphne David Delia Dennis Diana Dora Doris Edgar Edith Edmund Edwin Elena Elias
Ellen Elsa Emil Emma Enid Eric Erika Ernest Esther Ethan Eva Evan Faith Felix Fiona Flora Floyd
Frances Frank Freda Gavin Gemma George Gerald Gilbert Gina Gloria Grace Greta Gustav Hanna Harold
Harriet Harry Hazel Hector Heidi Helen Henry Herman Hilda Howard Hubert Hugo Ian Ida Igor Ines
Ingrid Irene Iris Isaac Ivan Ivy Jack Jacob James Jane Janet Jasper Jean Joan Joel John Jonas
Joseph Judith Julia Julius Karen Karl Kate Keith Kenneth Kevin Klara Klaus Kurt Laura Lena Leo
Leonard Leslie Lewis Lily Linda Lionel Louis Lucas Lucy Lydia Mabel Marcus Margaret Maria Marion
Mark Martha Martin Mary Matilda Max Melvin Michael Mildred Milton Mina Miriam Molly Mona Morris
Muriel Myra Nadia Nancy Naomi Nathan Nelly Nelson Nicholas Nina Noah Nora Norman Olga Oliver Olivia
Oscar Otto Owen Pamela Patrick Paul Paula Pearl Peter Philip Phoebe Phyllis Rachel Ralph Raymond
Rebecca Rita Robert Roger Roland Rosa Rudolf Rufus Rupert Ruth Samuel Sandra Sarah Simon Sofia
Stella Stephen Susan Sylvia Teresa Theodor Thomas Timothy Tobias Tom Ulrich Ursula Valerie Vera
Vernon Victor Viola Virginia Wallace Walter Wanda Warren Wendy Wilfred William Winifred Yvonne Zoe
""".split()

COLOURS = """
red blue green yellow black white brown grey purple pink golden silver striped
""".split()

OBJECTS = """
umbrella lantern kettle basket mirror hammer bottle carpet candle drum ladder blanket clock
compass bucket whistle suitcase scarf notebook teapot hat ring lamp box cup coat bag key knife
boat chair table cushion telescope globe vase bell brush rope kite
""".split()

CITIES = """
Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Athens Prague Warsaw Moscow Cairo Tokyo
Delhi Lima Boston Chicago Denver Dallas Geneva Zurich Milan Naples Venice Munich Hamburg Cologne
Brussels Helsinki Riga Vilnius Budapest Sofia Belgrade Zagreb Istanbul Havana Quito
""".split()

JOBS = """
baker doctor teacher farmer painter lawyer sailor tailor barber butcher carpenter plumber nurse
pilot miner judge soldier dentist porter weaver gardener jeweller printer fisherman singer dancer
writer actor clerk cook guard hunter driver banker chemist surgeon potter shepherd librarian cobbler
""".split()

FOODS = """
apples bread cheese soup rice honey plums grapes onions carrots beans butter chocolate pancakes
cherries noodles potatoes mushrooms sausages pears lemons walnuts olives tomatoes spinach pumpkin
salmon lobster waffles biscuits porridge cucumber
""".split()

INSTRUMENTS = """
piano violin flute trumpet guitar harp cello organ clarinet trombone banjo oboe tuba accordion
bassoon harmonica mandolin saxophone bagpipes xylophone
""".split()

ANIMALS = """
dog cat horse parrot rabbit goat turtle pony hamster goose donkey canary lizard hen owl ferret
""".split()

ADJECTIVES = """
old small quiet empty narrow wooden tall broken distant dusty heavy cold warm bright dark wide
""".split()

PLACES = """
bridge river garden tower market station road harbour church forest hill valley window door roof
wall square mill field castle street school lake island barn stable kitchen cellar gate tunnel
""".split()

FILLER_VERBS = """
stood lay rested waited shone remained leaned slept vanished stayed
""".split()

PREPOSITIONS = "behind beside near above below beyond under".split()

TIMES = "morning evening night winter summer autumn spring afternoon".split()

FUNCTION_WORDS = """
What Where Which does do keep keeps a live lives in work works as like likes play plays the pet
have has The It was all day and at that for
""".split()
