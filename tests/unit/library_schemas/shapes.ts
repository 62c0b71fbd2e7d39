// Types of usual shapes, for typescript-json-schema:
//
//   npm install typescript-json-schema@0.68.0 && node typescript.cjs > typescript.json
export interface Plain { path: string; count: number }
export interface Optional { path: string; limit?: number }
export interface Nullable { path: string | null; note?: string | null }
export interface Default {
  /** @default 10 */
  limit: number;
}
export enum Mode { Read = "read", Write = "write" }
export interface Enum { mode: Mode }
export interface Literal { kind: "file"; version: 2; yes: true }
export interface Choice { mode: "read" | "write" }
export interface Union { value: string | number | boolean }
export interface Move { type: "move"; to: string }
export interface Wait { type: "wait"; ms: number }
export interface Discriminated { action: Move | Wait }
export interface List { names: string[] }
export interface Tuple { point: [number, number]; rest: [string, ...number[]] }
export interface Dictionary { env: Record<string, string>; sizes: { [name: string]: number } }
export interface KeyedRecord { sizes: Record<"a" | "b", number> }
export interface PartialRecord { sizes: Partial<Record<"a" | "b", number>> }
export interface Nested { user: { name: string; address: { city: string } } }
export interface Tree { value: string; children: Tree[] }
export interface Annotated {
  /**
   * A number of lines.
   * @minimum 0
   * @maximum 100
   * @TJS-type integer
   */
  n: number;
  /** @pattern ^[a-z]+$ */
  id: string;
  /** @format email */
  email: string;
  /** @minItems 1 @uniqueItems true */
  names: string[];
}
export interface Unknown { payload: unknown; any: any; object: object }
export type Intersection = { a: string } & { b: number };
export interface Base { a: string }
export interface Derived extends Base { b: Date }
export interface Empty {}
