package wording

import (
	"fmt"
	"strings"
)

const ellipsis = "..."

// Shorten returns a text of at most most bytes, which ends with "..." if it was cut. It never splits a character. most
// must be at least 3.
func Shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-len(ellipsis)], "") + ellipsis
}

// ShortenList joins the first items of a list and says how many more there are.
func ShortenList[T any](items []T, most int, separator string) string {
	var words []string
	for _, item := range items[:min(most, len(items))] {
		words = append(words, fmt.Sprint(item))
	}
	joined := strings.Join(words, separator)
	if more := len(items) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", joined, more)
	}
	return joined
}
