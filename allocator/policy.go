package allocator

import "slices"

// Policy is how the best devices are chosen. In the formulas A is what is available, M ⊆ A what must be included, k the
// size, and X ranges over the sets M ⊆ X ⊆ A of k GPUs; S is the score of a set. Objectives are in order of importance:
// a later one only decides among sets that are equal by all earlier ones. The last of each is the set with the lowest
// GPUs: of two sets the one that has the first GPU in which they differ.
type Policy string

const (
	// Topology maximises S(X), then L(A \ X), then S(A \ X). What requests of the usual sizes could get of what stays is
	//
	//	L(R) = max{Σ s(p) over disjoint pairs p ⊆ R} + Σ max{S(Y) : Y ⊆ R, |Y| = j} over j = 4, 8 with j ≤ |R|
	//
	// so that GPUs are taken from an island that is broken already, and NVLinks are not cut.
	//
	// The answer is exact for nodes of up to 16 GPUs. On larger ones L is left out where the scores follow a tree, as those
	// of any PCIe fabric do, and the answer is exact but for that. Where they do not, it is exact if at most 16 are
	// available; with more, S(X) alone counts, the search ends after it has looked into 2,000 sets (maxSteps), and Choice
	// says how much higher the score of another set can be.
	Topology Policy = "topology"
	// Partition maximises Σ S(P) over the sets P of a partition of A into sets of k, one of which holds all of M; where k
	// does not divide |A|, one set is smaller. X is the set of k GPUs of that partition, holding M, with the highest S(X). Of
	// several such partitions it is the first in order, and of several sets too. This is what NVIDIA's go-gpuallocator
	// calls best effort, and the answer is the same; but it is never the smaller set.
	//
	// With more than 16 GPUs available it is Topology.
	Partition Policy = "partition"
	// NUMA minimises the number of NUMA nodes that have a GPU of X, then is Topology. GPUs whose NUMA node is not known count
	// as being on one together.
	NUMA Policy = "numa"
	// Spread gives devices of the GPUs that have fewest in use. With u(g) devices of GPU g that are not available, x(g) those
	// that are taken, and G the GPUs with x(g) > 0, it minimises
	//
	//	MIG devices:  Σ (u(g) + x(g))², then maximises |G|
	//	replicas:     Σ x(g)², then Σ u(g)·x(g)
	//
	// and is then Topology for G. So no GPU is in an answer twice while another has a replica. For whole GPUs it is Topology.
	Spread Policy = "spread"
	// Pack gives devices of the fullest GPUs that can still take them, so that whole ones stay whole. With f(g) devices of
	// GPU g that are available, and c(g) of its compute slices in use by MIG devices of all profiles, it
	//
	//	MIG devices:  minimises |G|, then maximises Σ c(g) over G, then minimises Σ f(g) over G, then maximises S(G),
	//	              then minimises Σ f(g)·x(g)
	//	replicas:     minimises Σ x(g)², then maximises Σ u(g)·x(g), then is Topology for G
	//
	// For whole GPUs it is Topology. On nodes of more than 16 GPUs, MIG devices of several GPUs are packed one GPU at a time:
	// |G| is as small as can be, the rest may not be.
	Pack Policy = "pack"
)

// Policies lists the policies.
func Policies() []string {
	return []string{string(Topology), string(Partition), string(NUMA), string(Spread), string(Pack)}
}

// Valid reports whether the policy is one of Policies.
func (p Policy) Valid() bool { return slices.Contains(Policies(), string(p)) }
