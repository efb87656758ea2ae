package topology

import (
	"strings"
	"unicode"
)

// longest is where a text from outside is cut, in characters. No real name or error is longer.
const longest = 400

// clean makes a text from outside safe to show: one line, without control characters, and without characters that
// reverse the direction of the text or pile up on a letter.
func clean(s string) string {
	var b strings.Builder
	n, last := 0, rune(0)
	for _, r := range s {
		separates := unicode.IsSpace(r) || unicode.IsControl(r)
		invalid := r == '\uFFFD' && last == '\uFFFD' // bytes that are not UTF-8 become one
		afterSpace := last == ' '
		if last = r; separates {
			last = ' '
		}
		if separates || invalid {
			continue
		}
		if n++; n > longest {
			return b.String() + "…"
		}
		if afterSpace && n > 1 {
			b.WriteByte(' ')
		}
		if !unicode.In(r, unicode.L, unicode.N, unicode.P, unicode.S) {
			r = '\uFFFD'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// font is a kind of font.
type font int

const (
	plain font = iota
	bold
	mono
)

// textWidth estimates the width of a text in pixels, in a font of that size. The figures are those of DejaVu Sans,
// which is wider than what most systems have for "sans-serif".
func textWidth(s string, size int, f font) int {
	sum := 0
	for _, r := range s {
		sum += advance(r, f)
	}
	return pixels(sum, size)
}

// pixels returns a width in thousandths of the font's size in pixels.
func pixels(width, size int) int { return (width*size + 999) / 1000 }

// advance returns a character's width in thousandths of the font's size.
func advance(r rune, f font) int {
	w := 640
	switch {
	case r >= 0x1100:
		return 1050
	case f == mono:
		return 610
	case unicode.IsUpper(r):
		w = 780
	case r > 0x7f:
		w = 840
	}
	switch r {
	case ' ', 'i', 'j', 'l', 'I', '.', ',', ':', ';', '\'', '|', '!':
		w = 330
	case 'f', 't', 'r', '(', ')', '[', ']', '-', '/':
		w = 420
	case 'm', 'w', 'M', 'W', '@', '%':
		w = 990
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
	sum, end, last := advance('…', f), 0, ' '
	for i, r := range s {
		if last != ' ' {
			end = i // what is before fits
		}
		if sum += advance(r, f); pixels(sum, size) > room {
			break
		}
		last = r
	}
	if end == 0 {
		return ""
	}
	return s[:end] + "…"
}

// choose returns the first label that has room, or "".
func choose(room, size int, f font, labels ...string) string {
	for _, s := range labels {
		if textWidth(s, size, f) <= room {
			return s
		}
	}
	return ""
}

// wrap breaks a text in the plain font into lines, at most as many as given. The last one is cut. A word that is wider
// than a line is broken.
func wrap(s string, room, size, most int) []string {
	var lines []string
	words := strings.Fields(s)
	for len(words) > 0 {
		if len(lines) == most-1 {
			return append(lines, fit(strings.Join(words, " "), room, size, plain))
		}
		line := words[0]
		words = words[1:]
		if head, tail := split(line, room, size); tail != "" {
			lines, words = append(lines, head), append([]string{tail}, words...)
			continue
		}
		for len(words) > 0 && textWidth(line+" "+words[0], size, plain) <= room {
			line += " " + words[0]
			words = words[1:]
		}
		lines = append(lines, line)
	}
	return lines
}

// split breaks a word that is wider than a line, after a hyphen or the like if there is one, but after one character at
// least.
func split(s string, room, size int) (head, tail string) {
	sum, end := 0, 0
	for i, r := range s {
		if sum += advance(r, plain); i > 0 && pixels(sum, size) > room {
			if end == 0 {
				end = i
			}
			return s[:end], s[end:]
		}
		if strings.ContainsRune("-/:_=.", r) {
			end = i + 1
		}
	}
	return s, ""
}
