package conformance

import (
	"errors"
	"strings"
)

// ErrQuotes means that a command line has a quote that does not end, or ends with a backslash.
var ErrQuotes = errors.New("a quote does not end")

// Words splits a command line as a POSIX shell does: at blanks, with single quotes, double quotes and backslashes.
// Nothing is expanded. The error is ErrQuotes.
func Words(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	var quote rune // that is open
	inWord, escaped := false, false
	for _, r := range line {
		switch {
		case escaped:
			if quote == '"' && !strings.ContainsRune("\"\\$`", r) {
				word.WriteByte('\\') // in double quotes it escapes only these
			}
			word.WriteRune(r)
			escaped = false
		case r == '\\' && quote != '\'':
			inWord, escaped = true, true
		case quote != 0 && r == quote:
			quote = 0
		case quote == 0 && (r == '\'' || r == '"'):
			inWord, quote = true, r
		case quote == 0 && strings.ContainsRune(" \t\n", r):
			if inWord {
				words = append(words, word.String())
				word.Reset()
			}
			inWord = false
		default:
			inWord = true
			word.WriteRune(r)
		}
	}
	if quote != 0 || escaped {
		return nil, ErrQuotes
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}
