package topology

import (
	"sort"
	"strings"
	"unicode"

	"gpu-cdi-plugin/internal/wording"
)

// longest is the length in bytes to which a text is cut that comes from outside the program. No real name or error is
// longer.
const longest = 400

// clean makes a text from outside safe to show: it is one line, without control characters, and without characters
// that reverse the direction of text or stack on a letter.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r) || unicode.IsControl(r):
			return ' '
		case !unicode.In(r, unicode.L, unicode.N, unicode.P, unicode.S):
			return '\uFFFD'
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	return wording.Shorten(strings.Join(strings.Fields(s), " "), longest)
}

type font int

const (
	plain font = iota
	bold
	mono
)

// textWidth estimates the width of a text in pixels at a font size. It uses the widths of DejaVu Sans, which is wider
// than the font that most systems use for "sans-serif".
func textWidth(s string, size int, f font) int {
	sum := 0 // in thousandths of the font size
	for _, r := range s {
		w := 640
		switch {
		case r >= 0x1100:
			w = 1050
		case f == mono:
			w = 610
		case strings.ContainsRune(" ijlI.,:;'|!", r):
			w = 330
		case strings.ContainsRune("ftr()[]-/", r):
			w = 420
		case strings.ContainsRune("mwMW@%", r):
			w = 990
		case unicode.IsUpper(r):
			w = 780
		case r > 0x7f:
			w = 840
		}
		if f == bold {
			w += 70
		}
		sum += w
	}
	return (sum*size + 999) / 1000
}

// fit cuts a text to a width and adds an ellipsis.
func fit(s string, room, size int, f font) string {
	if textWidth(s, size, f) <= room {
		return s
	}
	runes := []rune(s)
	n := sort.Search(len(runes), func(n int) bool { return textWidth(string(runes[:n+1])+"…", size, f) > room })
	if n == 0 {
		return ""
	}
	return strings.TrimSpace(string(runes[:n])) + "…"
}

// wrap breaks a text in the plain font between words, into at most `most` lines. What does not fit is cut.
func wrap(s string, room, size, most int) []string {
	var lines []string
	for words := strings.Fields(s); len(words) > 0; {
		n := 1
		for n < len(words) && textWidth(strings.Join(words[:n+1], " "), size, plain) <= room {
			n++
		}
		if len(lines) == most-1 { // the last line gets the rest, which fit cuts
			n = len(words)
		}
		lines = append(lines, fit(strings.Join(words[:n], " "), room, size, plain))
		words = words[n:]
	}
	return lines
}
