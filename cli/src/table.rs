//! Aligned tables. Pure; knows nothing of terminals but the width it is given.

/// Which side a column keeps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Rows under headings; every column as wide as its widest cell.
#[derive(Debug)]
pub struct Table {
    head: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(head: &[(&'static str, Align)]) -> Self {
        Self { head: head.to_vec(), rows: vec![] }
    }
    /// Adds a row; missing cells are empty, cells too many are a mistake of ours.
    pub fn row(&mut self, cells: Vec<String>) {
        assert!(cells.len() <= self.head.len(), "a row has {} cells under {} headings", cells.len(), self.head.len());
        self.rows.push(cells.into_iter().map(|c| clean(&c)).collect());
    }
    /// The table as text: two spaces between columns, none at line ends, a newline after every line.
    pub fn render(&self) -> String {
        let width: Vec<usize> = (0..self.head.len())
            .map(|i| {
                let cells = self.rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count());
                cells.chain([self.head[i].0.len()]).max().unwrap_or(0)
            })
            .collect();
        let head: Vec<String> = self.head.iter().map(|(h, _)| (*h).to_owned()).collect();
        let mut out = String::new();
        for row in std::iter::once(&head).chain(&self.rows) {
            let mut line = String::new();
            for (i, (_, align)) in self.head.iter().enumerate() {
                let cell = row.get(i).map_or("", String::as_str);
                let pad = " ".repeat(width[i].saturating_sub(cell.chars().count()));
                if i > 0 {
                    line.push_str("  ");
                }
                match align {
                    Align::Left => line.extend([cell, &pad]),
                    Align::Right => line.extend([&pad, cell]),
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// Text from elsewhere, made harmless for a terminal: control characters become `?`.
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_lines_have_no_trailing_space() {
        let mut t = Table::new(&[("NAME", Align::Left), ("SIZE", Align::Right), ("NOTE", Align::Left)]);
        t.row(vec!["quiet-otter".into(), "9 MiB".into(), "tests grün".into()]);
        t.row(vec!["x".into(), "1,204 MiB".into()]);
        assert_eq!(t.render(), "NAME              SIZE  NOTE\nquiet-otter      9 MiB  tests grün\nx            1,204 MiB\n");
    }

    #[test]
    fn a_note_cannot_move_the_cursor() {
        assert_eq!(clean("a\x1b]0;x\x07b\nc"), "a?]0;x?b?c");
    }
}
