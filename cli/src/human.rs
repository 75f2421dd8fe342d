//! Numbers as people read them: sizes in MiB, times in the unit that fits. Pure.

/// A size: `31 MiB`, `0.4 MiB`, `2,048 MiB`; `0` stays `0 MiB`.
pub fn mib(bytes: u64) -> String {
    const MIB: u64 = 1024 * 1024;
    if bytes == 0 {
        return "0 MiB".into();
    }
    let tenths = (u128::from(bytes) * 10 + u128::from(MIB / 2)) / u128::from(MIB);
    match tenths {
        0 => "<0.1 MiB".into(),
        1..=99 => format!("{}.{} MiB", tenths / 10, tenths % 10),
        _ => format!("{} MiB", thousands(bytes / MIB + u64::from(bytes % MIB >= MIB / 2))),
    }
}

/// At most `max` characters; what is left off shows as an ellipsis.
pub fn cut(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        None => text.to_owned(),
        Some((at, _)) => format!("{}… ({} more characters)", &text[..at], text[at..].chars().count()),
    }
}

/// `1204` as `1,204`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A span of microseconds: `0.4 ms`, `12 ms`, `3.4 s`, `4m12s`, `2h05m`, `3d04h`.
pub fn micros(us: u64) -> String {
    match us {
        0..10_000 => format!("{}.{} ms", us / 1000, us % 1000 / 100),
        10_000..1_000_000 => format!("{} ms", us / 1000),
        1_000_000..60_000_000 => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
        _ => long_span(us / 1_000_000),
    }
}

/// A span of milliseconds.
pub fn millis(ms: u64) -> String {
    micros(ms.saturating_mul(1000))
}

/// A span of whole seconds: `42 s`, `4m12s`, `2h05m`, `3d04h`.
pub fn seconds(s: u64) -> String {
    if s < 60 { format!("{s} s") } else { long_span(s) }
}

fn long_span(s: u64) -> String {
    match s {
        0..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// How long ago a Unix time in milliseconds was. Clocks that disagree give `0 s`, never a negative age.
pub fn age(now_ms: u64, then_ms: u64) -> String {
    seconds(now_ms.saturating_sub(then_ms) / 1000)
}

/// `1 file`, `2 files`.
pub fn count(n: u64, one: &str) -> String {
    format!("{} {one}{}", thousands(n), if n == 1 { "" } else { "s" })
}

/// A command as one line for people: words with anything but plain characters are quoted, long ones end in `…`.
pub fn command(words: &[String], width: usize) -> String {
    let plain = |w: &str| !w.is_empty() && w.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=,@+%".contains(c));
    let line: Vec<String> =
        words.iter().map(|w| if plain(w) { w.clone() } else { format!("'{}'", w.replace('\'', "'\\''")) }).collect();
    let line: String = line.join(" ").chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if line.chars().count() <= width { line } else { line.chars().take(width.saturating_sub(1)).chain(['…']).collect() }
}

/// A UTC time as `2025-03-04 05:06:07`.
pub fn utc(unix_ms: u64) -> String {
    let s = unix_ms / 1000;
    let (y, m, d) = civil(s / 86_400);
    let t = s % 86_400;
    format!("{y:04}-{m:02}-{d:02} {:02}:{:02}:{:02}", t / 3600, t % 3600 / 60, t % 60)
}

/// Days since 1970-01-01 as year, month, day (the era method of H. Hinnant's calendrical notes).
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let era = z / 146_097;
    let doe = z % 146_097;
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters_and_say_so() {
        assert_eq!(cut("grün", 4), "grün");
        assert_eq!(cut("grün!", 3), "grü… (2 more characters)");
        assert_eq!(cut("", 0), "");
    }

    #[test]
    fn sizes_are_mib_with_one_digit_below_ten() {
        let m = 1024 * 1024;
        for (b, s) in [
            (0, "0 MiB"),
            (1, "<0.1 MiB"),
            (m / 2, "0.5 MiB"),
            (m, "1.0 MiB"),
            (9 * m + m * 94 / 100, "9.9 MiB"),
            (10 * m, "10 MiB"),
            (420 * m, "420 MiB"),
            (2048 * m, "2,048 MiB"),
        ] {
            assert_eq!(mib(b), s, "{b}");
        }
        assert!(mib(u64::MAX).ends_with(" MiB"), "the largest number does not overflow");
    }

    #[test]
    fn spans_take_the_unit_that_fits() {
        for (us, s) in [
            (400, "0.4 ms"),
            (12_345, "12 ms"),
            (999_999, "999 ms"),
            (3_450_000, "3.4 s"),
            (252_000_000, "4m12s"),
            (7_500_000_000, "2h05m"),
            (273_600_000_000, "3d04h"),
        ] {
            assert_eq!(micros(us), s, "{us}");
        }
        assert_eq!(age(5_000, 9_000), "0 s");
        assert_eq!(age(100_000, 10_000), "1m30s");
    }

    #[test]
    fn dates_are_right_over_leap_years() {
        for (ms, s) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400_000, "2000-02-29 00:00:00"),
            (1_709_251_199_000, "2024-02-29 23:59:59"),
            (4_107_542_400_000, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(utc(ms), s);
        }
    }

    #[test]
    fn commands_are_quoted_shortened_and_carry_no_control_bytes() {
        let w = |v: &[&str]| v.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        assert_eq!(command(&w(&["sh", "-c", "echo 'a b'"]), 80), r"sh -c 'echo '\''a b'\'''");
        assert_eq!(command(&w(&["abcdefghij"]), 5), "abcd…");
        assert_eq!(command(&w(&["a\x1b[31mb"]), 80), "'a?[31mb'");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(count(1, "file"), "1 file");
        assert_eq!(count(1204, "file"), "1,204 files");
    }
}
