// Package allocator says which devices are best for a container: pure functions on a gpu.Snapshot.
//
// A Node is made once for each look at the driver, a Pool once for each resource that is offered. A request is then
// answered from them: no call waits for the driver, reads a file or takes a lock that is held for longer than a look at
// a cache. Nodes and Pools do not change and may be used from many goroutines.
//
// # Scores
//
// Each two GPUs a and b have a score s(a,b), the higher the better they are connected: Weights is the table. The score
// of a set of GPUs is the sum over its pairs, S(X) = Σ s(a,b) over all {a,b} ⊆ X. In what follows A is what is
// available, M ⊆ A what must be included, k the size that is asked for, and X ranges over the sets M ⊆ X ⊆ A of k GPUs.
//
// Each Policy has its objective as a formula.
//
// The package imports the model, gpu, and nothing else of the project. It knows nothing of the kubelet.
package allocator
