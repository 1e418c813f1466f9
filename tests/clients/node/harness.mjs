// Shared by the programs of this folder: read the name of a case from a line, write its result as a line.

import dns from 'node:dns';
import readline from 'node:readline';
import { inspect } from 'node:util';

// Test servers have numeric addresses. A name lookup means a connection to another machine.
dns.lookup = (name) => {
  throw new Error(`${name}: tests talk to loopback addresses only`);
};

/** Run a case for each line of input. `prepare` makes new cases for each. */
export async function runCases(prepare) {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { name, ...options } = JSON.parse(line);
    let outcome;
    try {
      outcome = { result: await prepare(options)[name]() };
    } catch (error) {
      outcome = { error: inspect(error) };
    }
    process.stdout.write(`${JSON.stringify(outcome)}\n`);
  }
}

/** Return all elements of a stream. */
export async function readAll(stream) {
  const elements = [];
  for await (const each of stream) elements.push(each);
  return elements;
}

/** Return the error that a call throws. */
export async function catchError(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error('The call did not fail.');
}

// A red dot.
export const PIXEL =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==';
