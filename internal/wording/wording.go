// Package wording makes texts for people: it counts and shortens things, quotes words for a shell, and suggests known
// names that are similar to a misspelt one.
package wording

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// Count returns a number with its noun, like "1 GPU" or "3 GPUs".
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// OneLine returns the text of an error in one line.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// Unbroken returns a text with blanks in place of its line breaks.
func Unbroken(text string) string { return breaks.ReplaceAllString(text, " ") }

var breaks = regexp.MustCompile(`(\r*\n)+`)

// Visible escapes control characters except line breaks, which could change a terminal: texts come from plugins, files
// and images.
func Visible(text string) string {
	var b strings.Builder
	for _, r := range text {
		if r == '\n' || unicode.IsGraphic(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}
