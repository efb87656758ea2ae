package allocator

import "slices"

// Policy is how the best devices are chosen. In the formulas A is what is available, M ⊆ A what must be included, k the
// size, and X ranges over the sets M ⊆ X ⊆ A of k GPUs; S is the score of a set. Objectives are in order of importance:
// a later one only decides among sets that are equal by all earlier ones. The last of each is the set with the lowest
// GPUs: of two sets the one that has the first GPU in which they differ.
type Policy string

const (
	// Topology maximises S(X), then S(A \ X): what stays available is as well connected as can be.
	//
	// It is exact for nodes of up to 16 GPUs, and for larger ones where the scores are those of a tree. Otherwise Choice
	// says how far from the best it may be.
	Topology Policy = "topology"
	// Partition maximises Σ S(P) over the sets P of a partition of A into sets of k, one of which holds all of M; where k
	// does not divide the number of GPUs in A, one set is smaller. X is the set of k of that partition, holding M, with the
	// highest S. This is what NVIDIA's go-gpuallocator calls best effort.
	Partition Policy = "partition"
	// NUMA minimises the number of NUMA nodes that X is on, then is Topology.
	NUMA Policy = "numa"
	// Spread gives devices of the GPUs that have fewest in use.
	Spread Policy = "spread"
	// Pack gives devices of the GPUs that have most in use.
	Pack Policy = "pack"
)

// Policies lists the policies.
func Policies() []string {
	return []string{string(Topology), string(Partition), string(NUMA), string(Spread), string(Pack)}
}

// Valid reports whether the policy is one of Policies.
func (p Policy) Valid() bool { return slices.Contains(Policies(), string(p)) }
