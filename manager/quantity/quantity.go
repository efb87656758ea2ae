// Package quantity parses, formats and adds quantities of Kubernetes, such as 500m and 16Gi. It does this like
// k8s.io/apimachinery/pkg/api/resource, which would add 0.7 MB to a program.
package quantity

import (
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// ErrInvalid means that a text is not a quantity.
var ErrInvalid = errors.New("want a quantity, such as 2, 500m or 16Gi")

// Format is how a quantity is written.
type Format int

const (
	// Decimal has the suffixes n, u, m, k, M, G, T, P and E, for powers of 1000.
	Decimal Format = iota
	// Binary has the suffixes Ki, Mi, Gi, Ti, Pi and Ei, for powers of 1024.
	Binary
)

const (
	maxLength   = 64
	maxExponent = 100 // after e or E; a larger one is out of range whatever number is before it
)

// The suffixes in the order of their powers. The decimal suffixes begin with 10^-9.
var (
	decimalSuffixes = []string{"n", "u", "m", "", "k", "M", "G", "T", "P", "E"}
	binarySuffixes  = []string{"", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"}
)

// Quantity is a number with a precision of 10^-9, and a format. The zero value is 0. Methods do not change a quantity,
// but return a new one.
type Quantity struct {
	nanos  big.Int
	format Format
}

// New returns a whole quantity.
func New(n int64, format Format) Quantity {
	q := Quantity{format: format}
	q.nanos.Mul(big.NewInt(n), power(10, 9))
	return q
}

var syntax = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([+-]?)([0-9]*)(?:\.([0-9]*))?(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,3}))?$`)
})

// Parse parses a quantity: a number, and after it a suffix or an exponent like e3. If there are more than 9 digits
// after the point, the number is rounded away from 0. Numbers beyond int64 are out of range. The error wraps
// ErrInvalid.
func Parse(s string) (Quantity, error) {
	m := syntax().FindStringSubmatch(s)
	if len(s) > maxLength || m == nil || m[2]+m[3] == "" {
		return Quantity{}, fmt.Errorf("%w", ErrInvalid)
	}
	sign, whole, fraction, suffix, exponent := m[1], m[2], m[3], m[4], m[5]
	digits, _ := new(big.Int).SetString(whole+fraction, 10)
	if sign == "-" {
		digits.Neg(digits)
	}
	scale := 9 - len(fraction) // the power of ten by which the digits become nanos
	q := Quantity{}
	switch {
	case strings.HasSuffix(suffix, "i"):
		q.format = Binary
		digits.Mul(digits, power(1024, index(binarySuffixes, suffix)))
	case exponent != "":
		e, err := strconv.Atoi(exponent)
		if err != nil || max(e, -e) > maxExponent {
			return Quantity{}, fmt.Errorf("%w: its exponent is out of range", ErrInvalid)
		}
		scale += e
	default:
		scale += 3*index(decimalSuffixes, suffix) - 9
	}
	q.nanos = *shift(digits, scale)
	if limit := New(1<<63-1, Decimal); q.nanos.CmpAbs(&limit.nanos) > 0 {
		return Quantity{}, fmt.Errorf("%w: it is out of range", ErrInvalid)
	}
	return q, nil
}

// shift returns n times a power of ten, rounded away from 0.
func shift(n *big.Int, exponent int) *big.Int {
	if exponent >= 0 {
		return n.Mul(n, power(10, exponent))
	}
	quotient, rest := new(big.Int).QuoRem(n, power(10, -exponent), new(big.Int))
	return quotient.Add(quotient, big.NewInt(int64(rest.Sign())))
}

func power(base int64, exponent int) *big.Int {
	return new(big.Int).Exp(big.NewInt(base), big.NewInt(int64(exponent)), nil)
}

func index(suffixes []string, suffix string) int {
	for i, s := range suffixes {
		if s == suffix {
			return i
		}
	}
	return -1
}

// Add returns q + r in the format of q.
func (q Quantity) Add(r Quantity) Quantity {
	sum := Quantity{format: q.format}
	sum.nanos.Add(&q.nanos, &r.nanos)
	return sum
}

// Sub returns q - r in the format of q.
func (q Quantity) Sub(r Quantity) Quantity {
	difference := Quantity{format: q.format}
	difference.nanos.Sub(&q.nanos, &r.nanos)
	return difference
}

// Sign returns -1, 0 or 1.
func (q Quantity) Sign() int { return q.nanos.Sign() }

// Whole returns the quantity as an integer; ok is false if it is not a whole number.
func (q Quantity) Whole() (n int64, ok bool) {
	quotient, rest := new(big.Int).QuoRem(&q.nanos, power(10, 9), new(big.Int))
	return quotient.Int64(), rest.Sign() == 0 && quotient.IsInt64()
}

// String formats the quantity with the largest suffix with which the number is whole. Binary quantities below 1024,
// and those that are not whole, get decimal suffixes.
func (q Quantity) String() string {
	n, whole := q.Whole()
	switch {
	case q.Sign() == 0:
		return "0"
	case q.format == Binary && whole && (n >= 1024 || n <= -1024):
		return reduce(big.NewInt(n), 1024, binarySuffixes)
	default:
		return reduce(new(big.Int).Set(&q.nanos), 1000, decimalSuffixes)
	}
}

// reduce formats n with the largest of the suffixes with which the number is whole. n is not 0, and counts units of
// the first suffix.
func reduce(n *big.Int, base int64, suffixes []string) string {
	for {
		quotient, rest := new(big.Int).QuoRem(n, big.NewInt(base), new(big.Int))
		if rest.Sign() != 0 || len(suffixes) == 1 {
			return n.String() + suffixes[0]
		}
		n, suffixes = quotient, suffixes[1:]
	}
}
