import unittest

from newsletter import headline


class HeadlineTest(unittest.TestCase):
    def test_headline(self):
        self.assertEqual(headline.make("a quiet week"), "A Quiet Week")
        self.assertLessEqual(len(headline.make("x" * 99)), 30)
