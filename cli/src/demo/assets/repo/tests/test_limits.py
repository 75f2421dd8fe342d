import unittest

from newsletter import limits


class LimitsTest(unittest.TestCase):
    def test_limits(self):
        self.assertTrue(limits.fits("a b", 2))
        self.assertFalse(limits.fits("a b c", 2))
