package host

import (
	"fmt"
	"strconv"
	"strings"
)

// ParseVersion splits a version into numbers of at most 9 digits: "580.126.09" becomes 580, 126, 9.
func ParseVersion(s string) ([]int, error) {
	var numbers []int
	for part := range strings.SplitSeq(s, ".") {
		n, err := strconv.Atoi(part)
		if err != nil || len(part) > 9 || strings.Trim(part, "0123456789") != "" { // Atoi allows a sign
			return nil, fmt.Errorf("%q is not a version, such as 580.126.09", s)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}
