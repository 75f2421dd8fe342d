import unittest

from newsletter import teaser


class TeaserTest(unittest.TestCase):
    def test_teaser(self):
        self.assertEqual(teaser.make("first\nsecond"), "first")
        self.assertLessEqual(len(teaser.make("y" * 200)), 60)
