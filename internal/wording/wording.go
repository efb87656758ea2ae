// Package wording makes texts for people: it counts and shortens things, quotes words for a shell, and suggests known
// names that are similar to a misspelt one.
package wording

import (
	"fmt"
	"strings"
)

// Count is "1 GPU" or "3 GPUs".
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// OneLine is the text of an error in one line.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
