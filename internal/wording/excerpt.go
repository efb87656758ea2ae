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

// Problems returns the lines of an error's text: each error of errors.Join has its own. A line break within one error,
// such as one in a name or a plugin's text, separates no errors and becomes a blank.
func Problems(err error) []string {
	var inner []error
	switch e := err.(type) { //nolint:errorlint // each error of the chain is looked at
	case *limited:
		return strings.Split(e.text, "\n")
	case interface{ Unwrap() []error }:
		inner = e.Unwrap()
	case interface{ Unwrap() error }:
		inner = []error{e.Unwrap()}
	}
	lines, rest := []string{""}, err.Error()
	add := func(text string) { lines[len(lines)-1] += text }
	for i, e := range inner {
		if e == nil {
			continue
		}
		before, after, found := strings.Cut(rest, e.Error())
		if !found { // the error has a text of its own
			return []string{Unbroken(err.Error())}
		}
		if i > 0 && before == "\n" {
			lines = append(lines, "")
		} else {
			add(Unbroken(before))
		}
		of := Problems(e)
		add(of[0])
		lines = append(lines, of[1:]...)
		rest = after
	}
	add(Unbroken(rest))
	return lines
}

// Limit returns an error that wraps err and whose text is not too long: it has the first 20 lines of the text of err,
// each with at most 1,000 bytes, and says how many more lines there are. Each problem of a file has its own line.
// Files and requests come from others, and an error that quotes them must fit into an answer and a log.
func Limit(err error) error {
	if err == nil {
		return nil
	}
	text := LimitText(strings.Join(Problems(err), "\n"))
	if text == err.Error() {
		return err
	}
	return &limited{text, err}
}

// LimitText returns a text that is not too long, as Limit does.
func LimitText(text string) string {
	lines := strings.Split(text, "\n")
	var short []string
	for _, line := range lines[:min(maxLines, len(lines))] {
		short = append(short, Shorten(line, maxLine))
	}
	if more := len(lines) - maxLines; more > 0 {
		short = append(short, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(short, "\n")
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
