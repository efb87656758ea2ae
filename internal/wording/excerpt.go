package wording

import (
	"fmt"
	"strings"
)

const ellipsis = "..."

// Shorten returns a text of at most `most` bytes, which ends with "..." if it was cut. It never splits a character.
// `most` must be at least 3.
func Shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-len(ellipsis)], "") + ellipsis
}

const (
	// maxLines is how many lines the text of an error may have, and maxLine how many bytes each of them.
	maxLines = 20
	maxLine  = 1000
)

// Limit returns an error that wraps err and whose text is not too long: it has the first 20 lines of the text of err,
// each with at most 1,000 bytes, and says how many more lines there are. Each problem of a file has its own line.
// Files and requests come from others, and an error that quotes them must fit into an answer and a log.
func Limit(err error) error {
	if err == nil {
		return nil
	}
	lines := strings.Split(err.Error(), "\n")
	var short []string
	for _, line := range lines[:min(maxLines, len(lines))] {
		short = append(short, Shorten(line, maxLine))
	}
	if more := len(lines) - maxLines; more > 0 {
		short = append(short, fmt.Sprintf("and %d more", more))
	}
	text := strings.Join(short, "\n")
	if text == err.Error() {
		return err
	}
	return &limited{text, err}
}

// limited is an error with another text.
type limited struct {
	text string
	err  error
}

func (e *limited) Error() string { return e.text }

func (e *limited) Unwrap() error { return e.err }

// ShortenList joins the first `most` items of a list and says how many more there are.
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
