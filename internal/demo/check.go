package demo

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Seen lists the UUIDs in the output of nvidia-smi -L, sorted.
func Seen(output string) []string {
	// So nvidia-smi -L ends the line of a GPU or of a MIG device. It is compiled here, as only the demo needs it.
	uuid := regexp.MustCompile(`\(UUID:\s*([A-Za-z0-9-]+)\)`)
	var seen []string
	for _, m := range uuid.FindAllStringSubmatch(output, -1) {
		seen = append(seen, m[1])
	}
	slices.Sort(seen)
	return seen
}

// Check says what is wrong with the output of nvidia-smi -L where exactly the devices with these UUIDs were given.
func Check(output string, want []string) error {
	seen := Seen(output)
	want = slices.Sorted(slices.Values(want))
	if slices.Equal(seen, want) {
		return nil
	}
	return fmt.Errorf("the container was given %s and saw %s", list(want), list(seen))
}

func list(uuids []string) string {
	if len(uuids) == 0 {
		return "nothing"
	}
	return strings.Join(uuids, ", ")
}
