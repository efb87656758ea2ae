package wording

import (
	"slices"
	"strings"
)

// maxEdits is how many letters of a similar name may be wrong, missing or extra.
const maxEdits = 2

// maxName is the length of the longest name that is compared, in bytes. No known name is similar to a longer one.
const maxName = 256

// Near returns the known names that are similar to a misspelt one, the closest first. Similar names differ only in
// case, hyphens and underscores, or in up to two letters, or begin with the misspelt name.
func Near(name string, known []string) []string {
	type match struct {
		name     string
		distance int
	}
	if len(name) > maxName {
		return nil
	}
	var found []match
	for _, k := range known {
		a, b := plain(name), plain(k)
		distance := edits(a, b)
		switch {
		case distance <= maxEdits && distance < len(b): // at least one letter must be right
		case len(a) > maxEdits && strings.HasPrefix(b, a):
			distance = maxEdits
		default:
			continue
		}
		found = append(found, match{k, distance})
	}
	slices.SortStableFunc(found, func(a, b match) int { return a.distance - b.distance })
	var names []string
	for _, m := range found {
		names = append(names, m.name)
	}
	return names
}

// Question returns the end of a message about an unknown name, "; did you mean X or Y?", or "" if no name is similar.
func Question(name string, known []string) string {
	names := Near(name, known)
	if len(names) == 0 {
		return ""
	}
	return "; did you mean " + strings.Join(names, " or ") + "?"
}

func plain(name string) string { return strings.ReplaceAll(strings.ToLower(name), "_", "-") }

// edits returns the Levenshtein distance: how many letters must be inserted, removed or replaced to turn a into b.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0] // the previous row's value, one column to the left
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
