package topology

import (
	"strings"
	"unicode"
)

// longest is where a text from outside is cut, in characters: no name or error is longer but a hostile one.
const longest = 400

// clean makes a text from outside safe to show: one line, no control characters, nothing that turns the direction of the
// text around or piles marks up on a letter.
func clean(s string) string {
	var b strings.Builder
	n := 0
	for _, word := range strings.FieldsFunc(strings.ToValidUTF8(s, "\uFFFD"), breaks) {
		if n > 0 {
			b.WriteByte(' ')
		}
		for _, r := range word {
			if n++; n > longest {
				return b.String() + "…"
			}
			if r != '\uFFFD' && !unicode.In(r, unicode.L, unicode.N, unicode.P, unicode.S) {
				r = '\uFFFD'
			}
			b.WriteRune(r)
		}
	}
	return b.String()
}

func breaks(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }

// textWidth is about how wide a text is, in pixels, in a font of that size. It errs on the wide side: the figures are those
// of DejaVu Sans, which is wider than what most systems have for "sans-serif".
func textWidth(s string, size int, f font) int {
	sum := 0
	for _, r := range s {
		sum += advance(r, f)
	}
	return (sum*size + 999) / 1000
}

// font is a kind of font.
type font int

const (
	plain font = iota
	bold
	mono
)

// advance is a character's width in thousandths of the font's size.
func advance(r rune, f font) int {
	switch {
	case r >= 0x1100:
		return 1050
	case f == mono:
		return 610
	}
	w := 640
	switch {
	case strings.ContainsRune(" ijlI.,:;'|!", r):
		w = 330
	case strings.ContainsRune("ftr()[]-/", r):
		w = 420
	case strings.ContainsRune("mwMW@%…", r):
		w = 990
	case unicode.IsUpper(r):
		w = 780
	case r > 0x7f:
		w = 840
	}
	if f == bold {
		w += 70
	}
	return w
}

// fit cuts a text to a width, with an ellipsis.
func fit(s string, room, size int, f font) string {
	if textWidth(s, size, f) <= room {
		return s
	}
	runes := []rune(s)
	for n := len(runes) - 1; n > 0; n-- {
		if short := strings.TrimRight(string(runes[:n]), " ") + "…"; textWidth(short, size, f) <= room {
			return short
		}
	}
	return ""
}

// choose returns the first of some labels that has room, or none.
func choose(room, size int, f font, labels ...string) string {
	for _, s := range labels {
		if textWidth(s, size, f) <= room {
			return s
		}
	}
	return ""
}

// wrap breaks a text in the plain font into at most that many lines; the last one is cut. A word that is wider than a line is broken.
func wrap(s string, room, size, most int) []string {
	var lines []string
	words := strings.Fields(s)
	for len(words) > 0 {
		if len(lines) == most-1 {
			return append(lines, fit(strings.Join(words, " "), room, size, plain))
		}
		n := 1
		for n < len(words) && textWidth(strings.Join(words[:n+1], " "), size, plain) <= room {
			n++
		}
		line := strings.Join(words[:n], " ")
		words = words[n:]
		if head, tail := split(line, room, size); tail != "" {
			line = head
			words = append([]string{tail}, words...)
		}
		lines = append(lines, line)
	}
	return lines
}

// split breaks a word where the room ends, behind a hyphen or the like if there is one. At least one character is before
// the break.
func split(s string, room, size int) (head, tail string) {
	if textWidth(s, size, plain) <= room {
		return s, ""
	}
	sum, mark := 0, 0
	for i, r := range s {
		sum += advance(r, plain)
		if i > 0 && (sum*size+999)/1000 > room {
			if mark == 0 {
				mark = i
			}
			return s[:mark], s[mark:]
		}
		if strings.ContainsRune("-/:_=.", r) {
			mark = i + 1
		}
	}
	return s, ""
}
