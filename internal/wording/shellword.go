package wording

import (
	"errors"
	"strings"
)

// unquoted are the characters that never need quotes.
const unquoted = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-,:=+@%"

// Quote returns text as one shell word, quoted if necessary. A shell word cannot contain a NUL.
func Quote(text string) string {
	if text != "" && strings.Trim(text, unquoted) == "" {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// Line joins words into a shell command line. It has line breaks only if a word has one.
func Line(words []string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = Quote(w)
	}
	return strings.Join(quoted, " ")
}

// ErrQuotes means that a command line has an unclosed quote or ends with a backslash.
var ErrQuotes = errors.New("a quote is not closed")

// Split splits a command line like a POSIX shell: at blanks, with single quotes, double quotes and backslashes, but
// without expansions. Its only error is ErrQuotes.
func Split(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	var quote rune // the open quote, or 0
	inWord, escaped := false, false
	for _, r := range line {
		switch {
		case escaped:
			if quote == '"' && !strings.ContainsRune("\"\\$`", r) {
				word.WriteByte('\\') // inside double quotes, a backslash escapes only these
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
