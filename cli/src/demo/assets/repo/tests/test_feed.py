import unittest

from newsletter import feed


class FeedTest(unittest.TestCase):
    def test_feed(self):
        e = feed.entry("spring news", "short")
        self.assertEqual(e, {"id": "spring-news", "title": "Spring News", "summary": "short"})
