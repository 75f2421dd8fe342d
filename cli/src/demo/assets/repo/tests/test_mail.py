import unittest

from newsletter import mail


class MailTest(unittest.TestCase):
    def test_mail(self):
        self.assertEqual(mail.subject(3, "hello there"), "[3] Hello There")
