// Package near finds the names that a misspelt one was probably meant to be.
package near

import (
	"slices"
	"strings"
)

// mostEdits is how many letters may be wrong, missing or too many.
const mostEdits = 2

// To returns the names that are close to a misspelt one, the closest first: those that differ by upper and lower case,
// hyphens and underscores alone, then those that differ in up to two letters, or begin with it.
func To(name string, known []string) []string {
	type match struct {
		name string
		far  int
	}
	var found []match
	for _, k := range known {
		a, b := plain(name), plain(k)
		far := edits(a, b)
		switch {
		case far <= mostEdits && far < len(b): // of a short name not every letter may be wrong
		case len(a) > mostEdits && strings.HasPrefix(b, a):
			far = mostEdits
		default:
			continue
		}
		found = append(found, match{k, far})
	}
	slices.SortStableFunc(found, func(a, b match) int { return a.far - b.far })
	var names []string
	for _, m := range found {
		names = append(names, m.name)
	}
	return names
}

// Question is "; did you mean X or Y?" behind a message about an unknown name, or empty where no known name is close.
func Question(name string, known []string) string {
	names := To(name, known)
	if len(names) == 0 {
		return ""
	}
	return "; did you mean " + strings.Join(names, " or ") + "?"
}

func plain(name string) string { return strings.ReplaceAll(strings.ToLower(name), "_", "-") }

// edits counts the letters that have to be put in, taken out or replaced to make a name of another (the Levenshtein
// distance).
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0] // of the row above, one to the left
		row[0] = i + 1
		for j := range len(b) {
			replaced := before
			if a[i] != b[j] {
				replaced++
			}
			before = row[j+1]
			row[j+1] = min(replaced, row[j]+1, before+1)
		}
	}
	return row[len(b)]
}
