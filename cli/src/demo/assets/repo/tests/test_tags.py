import unittest

from newsletter import tags


class TagsTest(unittest.TestCase):
    def test_tags(self):
        self.assertEqual(tags.clean(["New Stuff", "new stuff", "b"]), ["b", "new-stuff"])
