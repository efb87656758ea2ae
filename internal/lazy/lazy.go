// Package lazy makes values when they are first used, so that those that a program rarely needs cost its start nothing.
package lazy

import (
	"regexp"
	"sync"
)

// Regexp compiles an expression, which must be valid, when it is called for the first time.
func Regexp(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}
