import textkit


def minutes(text):
    return max(1, round(textkit.words(text) / 200))
