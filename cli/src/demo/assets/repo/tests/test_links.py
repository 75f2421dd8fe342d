import unittest

from newsletter import links


class LinksTest(unittest.TestCase):
    def test_links(self):
        self.assertEqual(links.anchor("What's new?"), "#what-s-new")
