import textkit


def subject(issue, text):
    return f"[{issue}] {textkit.cut(textkit.title(text), 50)}"
