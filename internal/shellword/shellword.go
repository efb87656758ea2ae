// Package shellword quotes text for a POSIX shell.
package shellword

import "strings"

// plain are the characters that mean themselves in every place.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-,:=+@%"

// Quote returns text as one word of a shell, in quotes if it needs them. No word can have a NUL.
func Quote(text string) string {
	if text != "" && strings.Trim(text, plain) == "" {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// Line returns words as they are written in a line of a shell. It has line breaks where the words have some.
func Line(words []string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = Quote(w)
	}
	return strings.Join(quoted, " ")
}
